"""Test doubles and invariant checks for stores: what casckpt's own fault suite uses, shipped for integrations.

* `recording`: record a workload's file operations and enumerate what a crash may leave behind
* `failing`: file systems that fail, interrupt or lie at the n-th operation; `wrapping` is what they are made of
* `killing`: SIGKILL to a real process at its n-th system call
* `invariants`: executable checks of a store against an oracle; `trees` compares without the store's code
* `anatomy`: what lies where in a store's files, who needs it, and what its loss must and may cost
* `workload`: a small history that touches every kind of timeline entry

`import casckpt` does not import this package.
"""
