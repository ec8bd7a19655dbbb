"""Bytes ↔ frozen values, and nothing else: no I/O, clock, randomness or torch.

`docs/format.md` is normative for what these files encode. One file per thing on disk:

* `record`: one stored form of an object (header + payload)
* `pack`: many records with a footer
* `entry`: one timeline entry, with the objects it carries inline
* `snapshot`: the objects of the Merkle tree (snapshot, context, manifest, node)
* `structure`, `layout`: the shape of a component, and where its bytes lie
* `document`: casckpt.json

Decoders check every length against the bytes at hand and against `limits` before they allocate, and raise
`CorruptionError` (damaged) or `UnsupportedFormatError` (newer).
"""
