"""`casckpt demo`: a real PPO run that is killed, resumed, proved bit-identical, and branched.

The parts, each readable alone:

* `_train.py`: the training loop: open, resume, commit. Start here; it is the example to copy.
* `_ppo.py`, `_environments.py`: the algorithm and the simulator. They know nothing of stores, only what their state is.
* `_worker.py`: the process that trains (`python -m casckpt.demo._worker`): determinism, timing, a JSON line per event.
* `_drive.py`: the parent: starts workers, kills one of them, reads their events.
* `_proof.py`: what "bit-identical" means: digests of values, and where two runs first differ.
* `_screen.py`, `command.py`: what a person sees, and the command line.

Nothing in this package is imported by `casckpt` itself. Gymnasium is needed only here (`pip install "casckpt[demo]"`).
"""
