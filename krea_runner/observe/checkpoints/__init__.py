"""Checkpoints as they lie on disk. Nothing in them is ever run, and nothing outside of them is ever opened.

newest    what a tick needs: names and one marker file, a few stat calls
times     how often they were written
tree      the bounded walk over the files of one, and the only `open`
pickles   what a pickle says, without any class
contents  zip directory, safetensors header, DCP's index
formats   the table: which framework's it is, when it is finished, what must be there
examine   all of that as one answer for each: step, size, whole or not and why
checksums what a file held when it was first seen whole
"""

from krea_runner.observe.checkpoints.newest import read_checkpoints

__all__ = ["read_checkpoints"]
