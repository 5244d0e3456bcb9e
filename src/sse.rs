//! Server-sent events from bytes, in any chunking (WHATWG event stream format).
