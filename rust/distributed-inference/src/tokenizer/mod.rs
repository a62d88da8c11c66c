//! The tokenizer.

/// The tokenizers that a host has loaded.
#[derive(Default)]
pub struct Tokenizers {}
