//! Where the load goes: a URL, a command, or this very binary as a server.
