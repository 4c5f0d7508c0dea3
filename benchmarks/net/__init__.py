"""Make several hosts on one machine: network namespaces, joined by a switch, with links of limited bandwidth.

Every host has a full-duplex link to one switch that does not block, as in a rack. The limit holds separately for data
that a host sends and receives. All hosts share the cores and the memory of the machine, so only exchanges are
realistic. The kernel's latency is tens of microseconds.
"""
