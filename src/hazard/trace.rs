//! From the engine's own device trace to [`Capture`](super::Capture)s.
