"""The Python side of the Rust crate: one client over its C ABI, and the hosts that run it."""
