"""Peers: what else one would keep a series of training states with, and casckpt, on the same states in one run.

    python -m benchmarks.peers --list --peers all
    python -m benchmarks.peers --corpus A,E --folder CORPORA --work DIR --json FILE
    python -m benchmarks.peers --table FILE

Python packages are pinned in `requirements.txt` beside this file. Debian 12's packages, in the releases that were
used:

    apt-get install zstd=1.5.4+dfsg2-5 borgbackup=1.2.4-1 restic=0.14.0-1+b5 casync=2+20201210-1+b1

| product | how it is used | a restore needs |
|---|---|---|
| casckpt | one store; levels fast, balanced, small; and in the background | a bounded chain of differences |
| torch.save | one file per snapshot; plain, or into zstd at level 3 or 9 on all cores | its own file |
| zstd --patch-from | each torch.save file as a difference to the last; levels 3, 9, 19 | every file before it |
| safetensors | one file per snapshot | its own file |
| ZipNN, OpenZL | one file per snapshot of compressed tensors, with their dtypes | its own file |
| torch DCP | one folder per snapshot; blocking, background, background with kept staging buffers | its own folder |
| Orbax/OCDBT | one folder per snapshot; blocking, background, background from JAX arrays | its own folder |
| Icechunk | one zarr array per tensor, versioned; zarr's default codec, or shuffle and zstd-3 | the repository |
| borg, restic, casync, hf-xet | files of torch.save, or of safetensors, deduplicated | the repository |

What makes the comparison fair, and where it favours somebody:

* Every peer gets the same live tensors, overwritten in place between commits as in training, and the whole state each
  time. Icechunk alone skips arrays that did not change, as versioned arrays invite to. A user of the others might keep
  a frozen reference in a file of its own.
* A commit counts as done when it would survive a power cut. Each peer's `durability` says what it does itself and what
  its adapter adds. The write-back queue is emptied before each timed commit. No transfer to other machines is measured.
* In one commit of asynchronous peers (the middle one) every tensor is changed as soon as the call returns; that
  snapshot is restored and compared like the others, so a stall that is short because nothing was captured is found out.
* Restores run in new processes, from the page cache, timed after the imports, and include what a product does at its
  start (borg's interpreter, Orbax's first call). Each restored state is compared with the series bit for bit. DCP alone
  loads into a state of the right form, with untouched memory, because that is how it works.
* Stored bytes are the apparent sizes of all files. Not counted, in the peers' favour: caches of borg, restic and
  hf-xet, and the uncompressed file that `zstd --patch-from` has to keep for the next difference.
* ZipNN and OpenZL get each large tensor with its dtype rather than one serialized file: they are smaller that way.
"""
