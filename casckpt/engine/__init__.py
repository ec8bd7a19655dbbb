"""The engine: decides what is saved when, and makes a training loop pay only for staging.

The loop says where its state is (`register`) and when it stands at a safe point (`step`). Everything else follows from
each component's `SaveStrategy`: which components are due, what the commit inherits, which are written first. The
engine knows no algorithm and no framework; it speaks to a store like any other caller.

* `engine.CheckpointEngine` is the public face;
* `strategy`, `cadence` and `budget` decide, and do nothing;
* `component` is what was registered, `saves` what is under way;
* `config` reads all of it from a file, `signals` listens for the end.
"""
