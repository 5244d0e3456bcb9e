//! Two arms or two results against each other.
