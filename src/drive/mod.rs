//! Sessions in flight: pacing, the client, latencies.
