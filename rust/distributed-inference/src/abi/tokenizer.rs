//! Tokenizers behind the ABI.

/// The functions of this file, for hosts that call by name.
pub const ENTRIES: &[super::Entry] = &[];
