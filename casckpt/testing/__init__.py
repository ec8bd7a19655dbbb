"""Test doubles and invariant checks for stores: what casckpt's own fault suite uses, shipped for integrations.

* `recording`: record a workload's file operations and enumerate what a crash may leave behind.
* `failing`: file systems that fail, interrupt or lie at the n-th operation.
* `invariants`: executable checks of a store against an oracle.
* `workload`: a small history that touches every kind of timeline entry.

`import casckpt` does not import this package.
"""
