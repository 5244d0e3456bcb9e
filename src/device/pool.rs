//! The caching allocator: PyTorch semantics, for every backend.
