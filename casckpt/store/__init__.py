"""The user model: runs, branches, snapshots; commit, restore, resume.

* `store`: the `Store` handle and `open`
* `values`: what it hands out
* `catalog`: references resolved, timelines listed
* `commit`: state to snapshot
* `restore`: snapshot to state
* `verify`, `compare`: damage found, differences named
* `background`: commits on a thread of their own
"""
