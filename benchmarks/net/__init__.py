"""Make several hosts on one machine: network namespaces, joined by a switch, every link with the bandwidth asked for.

*What it is like.* Every host has a full-duplex link to one switch that does not block, as in a rack: a limit holds for
what a host sends and, separately, for what it receives. Ranks of one host talk through its loopback, without limit.

*What it is not like.* All hosts share the cores and the memory of the machine, so only exchanges are like those of a
cluster, and computation only where each rank has cores of its own. Latency is that of the kernel, tens of microseconds.
"""
