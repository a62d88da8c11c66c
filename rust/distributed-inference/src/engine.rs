//! The engine: one region and what has been configured in it.

use crate::Result;
use crate::region::Region;
use crate::tokenizer::Tokenizers;

/// One engine. A wasm instance or a Python process may own several.
pub struct Engine {
    /// The memory that host and engine share.
    pub region: Region,
    /// Bytes the region may never exceed.
    pub limit: usize,
    /// The tokenizers that the host has loaded.
    pub tokenizers: Tokenizers,
}

impl Engine {
    /// An engine with a mailbox and nothing else, whose region may grow to `limit` bytes.
    pub fn new(limit: usize) -> Result<Self> {
        Ok(Self { region: Region::reserve(0, 0, 0, limit)?, limit, tokenizers: Tokenizers::default() })
    }

    /// Reserves an arena of `bytes` and nothing else: for tokenizers and for single kernels.
    pub fn reserve_arena(&mut self, bytes: usize) -> Result<()> {
        self.region = Region::reserve(0, 0, bytes, self.limit)?;
        Ok(())
    }
}
