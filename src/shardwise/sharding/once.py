"""The lock for objects that must exist once: interned values, the information about a mesh, a runtime.

Looking one up takes no lock. A thread that finds none makes one, and holds the lock while it enters it, so that two
threads never use two objects for the same thing.
"""

import threading

making = threading.RLock()
