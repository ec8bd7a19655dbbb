"""`casckpt drill --demo`: a distributed PPO to practise recovery on, one learner and several actors.

The parts, each readable alone:

* `_messages.py`: what goes over the wire, and how both sides read it; no pickle.
* `_actor.py`: the process that plays (`python -m casckpt.demo.distributed._actor`); has neither torch nor a store.
* `_exchange.py`: the learner's socket: hands items out, takes samples in, refuses what must not be trained on.
* `_learner.py`: the process that trains, commits and recovers (`python -m casckpt.demo.distributed._learner`).
* `_drill.py`: the parent: keeps all of them alive, injects faults, and compares with a training that met none.

An *item* is a share of one update: play whole episodes with this policy, seeded by the item's number. Its result is a
function of the policy and the number, so it does not matter which actor plays it, or how often: a training that met any
number of faults must be bit-identical to one that met none. That is what the drill checks in the end.
"""
