"""Peers that other environments have."""

from benchmarks.kernel_peers import Peer

GPU_PEERS: tuple[Peer, ...] = ()
