//! Probes of the running engine: the graph-against-eager differential and the index-K canary.
