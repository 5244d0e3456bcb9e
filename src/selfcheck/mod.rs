//! A server with known faults, played at full load against the harness itself.
