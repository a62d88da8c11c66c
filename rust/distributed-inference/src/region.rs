//! The one region of memory that an engine reserves: `mailbox | persistent | scratch | arena`.
//!
//! Wasm memory never shrinks and every growth detaches the host's views, so the region is
//! reserved once, when the engine is configured, and nothing is allocated per token after that.

use crate::{Result, fail};

/// Bytes at the start of the region for small arguments, row tables and answers.
pub const MAILBOX_BYTES: usize = 64 * 1024;

/// Everything in the region starts at a multiple of this many bytes.
pub const ALIGNMENT: usize = 64;

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

/// The parts of a [`Region`], borrowed together so that one can be read while another is written.
pub struct Parts<'a> {
    /// Small arguments and answers.
    pub mailbox: &'a mut [u8],
    /// Norms, biases, KV pages, kept logits: what outlives a batch.
    pub persistent: &'a mut [u8],
    /// Activations of the batch that is running.
    pub scratch: &'a mut [u8],
    /// Weight blocks, in transit or pinned.
    pub arena: &'a mut [u8],
}

/// One reservation and where its parts begin.
pub struct Region {
    lines: Vec<Line>,
    persistent: usize,
    scratch: usize,
    arena: usize,
}

/// Rounds `bytes` up to the region's alignment.
pub const fn align_up(bytes: usize) -> usize {
    bytes.div_ceil(ALIGNMENT) * ALIGNMENT
}

impl Region {
    /// Reserves a region with the given part sizes in bytes (each rounded up to the alignment).
    pub fn reserve(persistent: usize, scratch: usize, arena: usize, limit: usize) -> Result<Self> {
        let total = [MAILBOX_BYTES, persistent, scratch, arena]
            .iter()
            .try_fold(0usize, |sum, part| sum.checked_add(part.checked_next_multiple_of(ALIGNMENT)?));
        let Some(total) = total.filter(|total| *total <= limit) else {
            fail!(
                OverBudget,
                "the engine needs {persistent} bytes persistent + {scratch} scratch + {arena} arena \
                 + {MAILBOX_BYTES} mailbox, more than its limit of {limit}"
            );
        };
        let mut lines = Vec::new();
        if lines.try_reserve_exact(total / ALIGNMENT).is_err() {
            fail!(OverBudget, "the host could not provide {total} bytes for the engine's region");
        }
        lines.resize(total / ALIGNMENT, Line([0; ALIGNMENT]));
        let persistent_at = MAILBOX_BYTES;
        let scratch_at = persistent_at + align_up(persistent);
        Ok(Self {
            lines,
            persistent: persistent_at,
            scratch: scratch_at,
            arena: scratch_at + align_up(scratch),
        })
    }

    /// Bytes in the whole region.
    pub fn len(&self) -> usize {
        self.lines.len() * ALIGNMENT
    }

    /// Whether nothing is reserved (never true of a live engine: there is always a mailbox).
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Offset of the persistent part.
    pub fn persistent_offset(&self) -> usize {
        self.persistent
    }

    /// Offset of the scratch part.
    pub fn scratch_offset(&self) -> usize {
        self.scratch
    }

    /// Offset of the arena.
    pub fn arena_offset(&self) -> usize {
        self.arena
    }

    /// Address of the region's first byte in the host's address space.
    pub fn base(&self) -> *const u8 {
        self.lines.as_ptr().cast()
    }

    /// The whole region.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    /// The whole region, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }

    /// The region's parts, all borrowed at once.
    pub fn parts(&mut self) -> Parts<'_> {
        let (persistent, scratch, arena) = (self.persistent, self.scratch, self.arena);
        let bytes = self.bytes_mut();
        let (mailbox, rest) = bytes.split_at_mut(persistent);
        let (persistent_part, rest) = rest.split_at_mut(scratch - persistent);
        let (scratch_part, arena_part) = rest.split_at_mut(arena - scratch);
        Parts { mailbox, persistent: persistent_part, scratch: scratch_part, arena: arena_part }
    }

    /// `length` bytes at `offset`, or an error that names `what`.
    pub fn slice(&self, what: &str, offset: u32, length: u32) -> Result<&[u8]> {
        let range = self.check(what, offset, length)?;
        Ok(&self.bytes()[range])
    }

    /// `length` bytes at `offset` to write, or an error that names `what`.
    pub fn slice_mut(&mut self, what: &str, offset: u32, length: u32) -> Result<&mut [u8]> {
        let range = self.check(what, offset, length)?;
        Ok(&mut self.bytes_mut()[range])
    }

    fn check(&self, what: &str, offset: u32, length: u32) -> Result<std::ops::Range<usize>> {
        let (offset, length) = (offset as usize, length as usize);
        match offset.checked_add(length) {
            Some(end) if end <= self.len() => Ok(offset..end),
            _ => fail!(
                OutOfBounds,
                "{what}: {length} bytes at offset {offset} leave the region of {} bytes",
                self.len()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_as_large_as_asked() {
        let mut region = Region::reserve(100, 200, 300, 1 << 20).unwrap();
        let parts = region.parts();
        assert_eq!(parts.mailbox.len(), MAILBOX_BYTES);
        assert_eq!((parts.persistent.len(), parts.scratch.len(), parts.arena.len()), (128, 256, 320));
    }

    #[test]
    fn a_region_over_its_limit_is_refused_with_the_figures() {
        let error = Region::reserve(1000, 0, usize::MAX - 10, 1 << 20).err().unwrap();
        assert_eq!(error.kind, crate::Kind::OverBudget);
        assert!(error.message.contains("1048576"), "{error}");
    }

    #[test]
    fn a_slice_that_leaves_the_region_is_refused() {
        let region = Region::reserve(0, 0, 64, 1 << 20).unwrap();
        assert!(region.slice("block", MAILBOX_BYTES as u32, 64).is_ok());
        assert!(region.slice("block", MAILBOX_BYTES as u32, 65).is_err());
        assert!(region.slice("block", u32::MAX, u32::MAX).is_err());
    }
}
