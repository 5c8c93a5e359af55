"""What `scripts/bench.py` is made of: model, files, cases, stopwatch and report.

Measured with it on 2 cores of a virtual machine with a disk of 0.6 GB/s, and kept:

* Writes of 1 MiB.  In calls of 8 MiB the kernel takes pages of 2 MiB, which a virtual machine has
  to ask its host for: 4.0 s for 1 GiB instead of 0.3.
* Writing to disk begins with each band, so that what is left at the end takes 0.04 s, not 1.5.
* Bands of 4 MiB, read and copied while they are in the processor's cache.
* Outputs that want parts of the same rows are written together: a transposed cut reads 1 GiB
  instead of 8.
* Headers of a rank are compared with those of another before they are parsed, and asked of the disk
  all at once: 1.3 -> 0.43 s of processor time for 128 ranks of 600 tensors, and a third less time
  where the page cache is empty.

Tried, and no help:

* ``copy_file_range``: bytes that the kernel copies cannot be hashed on the way, and a manifest has
  the hash of all.
* ``POSIX_FADV_SEQUENTIAL`` for contents (10.7 s, 10.8 without, on a busy machine), and
  ``POSIX_FADV_WILLNEED`` for what comes next (12.7 s).
* ``POSIX_FADV_RANDOM`` for headers.
* No ``fsync``: 4 GiB merged in 8.4 and 9.5 s, with it in 8.5 and 10.3, since the disk is busy with
  reads and writes all the time (2 GiB read in 3.4 s, written in 2.4, both at once in 4.2).  Output
  left in the page cache as well: 14.0 and 15.5 s, as the host has to find memory for it.
* ``O_DIRECT`` for reads: 0.1 s of system time for 1 GiB instead of 0.5 to 0.6, which is not what is
  short, and a source that is in the page cache would be read from the disk.
"""
