"""The lock under which interned values, `MeshInfo`s and runtimes are entered into their tables.

A look-up takes no lock. A thread that finds no entry makes one, and holds the lock while it enters it, so that all
threads use the same object.
"""

import threading

making = threading.RLock()
