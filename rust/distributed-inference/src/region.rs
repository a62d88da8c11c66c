//! The one region of memory that an engine reserves: `mailbox | persistent | scratch | arena`.
//!
//! Wasm memory never shrinks and every growth detaches the host's views, so the region is
//! reserved once, when the engine is configured, and nothing is allocated per token after that.

use crate::{Result, fail};
use std::ops::Range;

/// Bytes at the start of the region for small arguments, row tables and answers.
pub const MAILBOX_BYTES: usize = 64 * 1024;

/// The most bytes a region can have: results of the ABI are signed, and offsets are results.
pub const MOST_BYTES: u64 = i32::MAX as u64;

/// Everything in the region starts at a multiple of this many bytes.
pub const ALIGNMENT: usize = 64;

/// Regions from this size on are asked for in large pages.
#[cfg(all(target_os = "linux", not(miri)))]
const LARGE_BYTES: usize = 8 << 20;

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

/// What the engine reads weights and vectors from, while it writes into the other parts.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    mailbox: &'a [u8],
    arena: &'a [u8],
    arena_at: usize,
}

impl<'a> Inputs<'a> {
    /// `length` bytes at region offset `at`, in the mailbox or in the arena, or an error that names `what`.
    pub fn slice(&self, what: impl std::fmt::Display, at: u32, length: u32) -> Result<&'a [u8]> {
        let (at, length) = (at as usize, length as usize);
        let end = at.saturating_add(length);
        if end <= self.mailbox.len() {
            Ok(&self.mailbox[at..end])
        } else if at >= self.arena_at && end - self.arena_at <= self.arena.len() {
            Ok(&self.arena[at - self.arena_at..end - self.arena_at])
        } else {
            fail!(
                OutOfBounds,
                "{what}: {length} bytes at offset {at} lie neither in the mailbox (0 to {}) nor in the arena \
                 ({} to {})",
                self.mailbox.len(),
                self.arena_at,
                self.arena_at + self.arena.len()
            )
        }
    }
}

/// Arguments, an answer, and what the answer is made from, borrowed together.
pub struct Exchange<'a> {
    /// The arguments' bytes.
    pub arguments: &'a [u8],
    /// Room for the answer.
    pub answer: &'a mut [u8],
    /// The persistent part.
    pub persistent: &'a mut [f32],
    /// The scratch.
    pub scratch: &'a mut [f32],
}

/// Asks Linux to back memory that nothing has touched yet with large pages, as far as it likes. A forward pass
/// reads all weights once, so that every page of 4 KB costs a walk through the page tables: where those are
/// nested, as in virtual machines, that can take longer than reading the page.
#[cfg(all(target_os = "linux", not(miri)))]
fn in_large_pages(first: *mut Line, bytes: usize) {
    const PAGE: usize = 4096;
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(address: *mut std::ffi::c_void, length: usize, advice: i32) -> i32;
    }
    let skipped = first.addr().next_multiple_of(PAGE) - first.addr();
    if bytes >= LARGE_BYTES {
        // SAFETY: whole pages of one allocation; the advice changes no content, and its refusal is no matter.
        unsafe { madvise(first.byte_add(skipped).cast(), (bytes - skipped) / PAGE * PAGE, MADV_HUGEPAGE) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn in_large_pages(_first: *mut Line, _bytes: usize) {}

fn disjoint(part: &mut [u8], read: Range<usize>, write: Range<usize>) -> Option<(&[u8], &mut [u8])> {
    if read.end <= write.start {
        let (before, after) = part.split_at_mut(write.start);
        Some((&before[read], &mut after[..write.len()]))
    } else if write.end <= read.start {
        let (before, after) = part.split_at_mut(read.start);
        Some((&after[..read.len()], &mut before[write]))
    } else {
        None
    }
}

/// The region's bytes on both sides of an output that is being written.
pub struct Beside<'a> {
    before: &'a [u8],
    after: &'a [u8],
    after_at: usize,
}

impl<'a> Beside<'a> {
    /// `length` bytes at `offset` that do not overlap the output, or an error that names `what`.
    pub fn slice(&self, what: &str, offset: u32, length: u32) -> Result<&'a [u8]> {
        let (offset, length) = (offset as usize, length as usize);
        let end = offset.saturating_add(length);
        if end <= self.before.len() {
            Ok(&self.before[offset..end])
        } else if offset >= self.after_at && end - self.after_at <= self.after.len() {
            Ok(&self.after[offset - self.after_at..end - self.after_at])
        } else if end > self.after_at + self.after.len() {
            fail!(OutOfBounds, "{what}: {length} bytes at offset {offset} leave the region")
        } else {
            fail!(
                BadArgument,
                "{what}: {length} bytes at offset {offset} overlap the output at {} to {}",
                self.before.len(),
                self.after_at
            )
        }
    }
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
    /// Bytes that a region with the given part sizes takes, or an error when the ABI cannot address it.
    pub fn bytes_for(persistent: u64, scratch: u64, arena: u64) -> Result<usize> {
        let parts = [MAILBOX_BYTES as u64, persistent, scratch, arena];
        let total = parts
            .iter()
            .try_fold(0u64, |sum, part| sum.checked_add(part.checked_next_multiple_of(ALIGNMENT as u64)?));
        match total {
            Some(total) if total <= MOST_BYTES => Ok(total as usize),
            _ => fail!(
                OverBudget,
                "the engine would need {persistent} bytes persistent + {scratch} scratch + {arena} arena \
                 + {MAILBOX_BYTES} mailbox, more than the {MOST_BYTES} that its ABI can address"
            ),
        }
    }

    /// Reserves a region with the given part sizes in bytes (each rounded up to the alignment).
    pub fn reserve(persistent: u64, scratch: u64, arena: u64, limit: usize) -> Result<Self> {
        let total = Self::check_budget(persistent, scratch, arena, limit)?;
        let mut lines = Vec::new();
        if lines.try_reserve_exact(total / ALIGNMENT).is_err() {
            fail!(OverBudget, "the host could not provide {total} bytes for the engine's region");
        }
        in_large_pages(lines.as_mut_ptr(), total);
        lines.resize(total / ALIGNMENT, Line([0; ALIGNMENT]));
        let persistent_at = MAILBOX_BYTES;
        let scratch_at = persistent_at + align_up(persistent as usize);
        let arena_at = scratch_at + align_up(scratch as usize);
        Ok(Self { lines, persistent: persistent_at, scratch: scratch_at, arena: arena_at })
    }

    /// The bytes that [`Region::reserve`] would take, or its error when they are over `limit`.
    pub fn check_budget(persistent: u64, scratch: u64, arena: u64, limit: usize) -> Result<usize> {
        let total = Self::bytes_for(persistent, scratch, arena)?;
        if total > limit {
            fail!(
                OverBudget,
                "the engine needs {persistent} bytes persistent + {scratch} scratch + {arena} arena \
                 + {MAILBOX_BYTES} mailbox = {total}, more than its limit of {limit}"
            );
        }
        Ok(total)
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

    /// What can be read (mailbox and arena) beside the persistent part and the scratch, as numbers to write.
    pub fn split(&mut self) -> (Inputs<'_>, &mut [f32], &mut [f32]) {
        let arena_at = self.arena;
        let Parts { mailbox, persistent, scratch, arena } = self.parts();
        let inputs = Inputs { mailbox, arena, arena_at };
        (inputs, bytemuck::cast_slice_mut(persistent), bytemuck::cast_slice_mut(scratch))
    }

    /// Arguments (offset, length) and room for an answer, each in the mailbox or in the arena and not
    /// overlapping, with the parts that the answer is made from.
    pub fn exchange(&mut self, arguments: (u32, u32), answer: (u32, u32)) -> Result<Exchange<'_>> {
        let (inputs, _, _) = self.split();
        inputs.slice("the arguments", arguments.0, arguments.1)?;
        inputs.slice("the answer", answer.0, answer.1)?;
        let arena_at = self.arena;
        let range = |(at, length): (u32, u32)| at as usize..at as usize + length as usize;
        let in_arena = |(at, length): (u32, u32)| at as usize + length as usize > MAILBOX_BYTES;
        let local = |range: Range<usize>| range.start - arena_at..range.end - arena_at;
        let (read, write) = (range(arguments), range(answer));
        let Parts { mailbox, persistent, scratch, arena } = self.parts();
        let pair = match (in_arena(arguments), in_arena(answer)) {
            (false, false) => disjoint(mailbox, read.clone(), write.clone()),
            (true, true) => disjoint(arena, local(read.clone()), local(write.clone())),
            (false, true) => Some((&mailbox[read.clone()], &mut arena[local(write.clone())])),
            (true, false) => Some((&arena[local(read.clone())], &mut mailbox[write.clone()])),
        };
        let Some((arguments, answer)) = pair else {
            fail!(BadArgument, "the arguments at {read:?} and the room for the answer at {write:?} overlap");
        };
        let (persistent, scratch) = (bytemuck::cast_slice_mut(persistent), bytemuck::cast_slice_mut(scratch));
        Ok(Exchange { arguments, answer, persistent, scratch })
    }

    /// `length` bytes at `offset` to write, and the region beside them to read meanwhile.
    pub fn output(&mut self, what: &str, offset: u32, length: u32) -> Result<(Beside<'_>, &mut [u8])> {
        let range = self.check(what, offset, length)?;
        let (before, rest) = self.bytes_mut().split_at_mut(range.start);
        let (output, after) = rest.split_at_mut(range.len());
        Ok((Beside { before, after, after_at: range.end }, output))
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

    fn check(&self, what: &str, offset: u32, length: u32) -> Result<Range<usize>> {
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
        let error = Region::reserve(1000, 0, 1 << 20, 1 << 20).err().unwrap();
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

    #[test]
    fn what_the_abi_cannot_address_is_refused_whatever_the_limit() {
        for arena in [MOST_BYTES, u64::MAX] {
            let error = Region::reserve(0, 0, arena, usize::MAX).err().unwrap();
            assert_eq!(error.kind, crate::Kind::OverBudget);
        }
    }

    #[test]
    fn inputs_come_from_the_mailbox_or_the_arena_and_nowhere_else() {
        let mut region = Region::reserve(64, 64, 64, 1 << 20).unwrap();
        let (mailbox, arena) = (MAILBOX_BYTES as u32, MAILBOX_BYTES as u32 + 128);
        let (inputs, _, _) = region.split();
        assert_eq!(inputs.slice("block", 0, mailbox).unwrap().len(), MAILBOX_BYTES);
        assert_eq!(inputs.slice("block", arena + 1, 63).unwrap().len(), 63);
        for (at, length) in
            [(mailbox - 1, 2), (mailbox, 64), (arena - 1, 2), (arena, 65), (u32::MAX, u32::MAX)]
        {
            assert_eq!(inputs.slice("block", at, length).unwrap_err().kind, crate::Kind::OutOfBounds);
        }
    }

    #[test]
    fn an_output_and_what_is_read_beside_it_cannot_overlap() {
        let mut region = Region::reserve(0, 0, 64, 1 << 20).unwrap();
        let arena = region.arena_offset() as u32;
        let (beside, output) = region.output("answer", arena + 16, 16).unwrap();
        assert_eq!(output.len(), 16);
        assert!(beside.slice("x", arena, 16).is_ok() && beside.slice("x", arena + 32, 32).is_ok());
        assert_eq!(beside.slice("x", arena, 17).unwrap_err().kind, crate::Kind::BadArgument);
        assert_eq!(beside.slice("x", arena + 31, 1).unwrap_err().kind, crate::Kind::BadArgument);
        assert_eq!(beside.slice("x", arena + 32, 33).unwrap_err().kind, crate::Kind::OutOfBounds);
    }
}
