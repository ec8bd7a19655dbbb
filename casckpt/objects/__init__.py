"""Objects by address: the timeline log, packs written and read, and the index kept in step with them.

* `timeline`: numbered entry files; appending one is the commit point
* `packs`: pack files read: footers, scanning, which bytes lie where
* `apply`: a timeline entry turned into index rows
* `writer`: hash, look up, encode, write, verify
* `reader`: locate, read, decode, verify
* `pool`: threads around code that releases the GIL
"""
