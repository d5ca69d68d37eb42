"""Run a program with shardwise in the place of `torch.distributed.tensor`.

    python -m shardwise.run train.py --lr 0.1
    torchrun --nproc-per-node 4 -m shardwise.run train.py --lr 0.1
    python -m shardwise.run -m package.train --lr 0.1

The program runs in the namespace of this module, which stays `__main__`. Processes that it spawns import `__main__`
again, as `__mp_main__`, and so come here and get shardwise, too.
"""

if __name__ in ("__main__", "__mp_main__"):
    from shardwise.dropin.program import prepare

    exec(prepare(globals()), globals())
