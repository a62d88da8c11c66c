//! Memory, errors and digests: what every host needs whatever the engine is for.

use super::abi;
use crate::fail;
use crate::region::MAILBOX_BYTES;
use xxhash_rust::xxh3::xxh3_64;

abi! {
    /// Reserves an arena of `bytes`, dropping whatever the region held.
    fn engine_reserve_arena(engine, bytes) {
        engine.reserve_arena(bytes.into())?;
        Ok(0)
    }

    /// Bytes in the region.
    fn engine_region_bytes(engine) {
        Ok(engine.region.len() as u32)
    }

    /// Bytes in the mailbox, which starts at offset 0.
    fn engine_mailbox_bytes(_engine) {
        Ok(MAILBOX_BYTES as u32)
    }

    /// Offset of the arena.
    fn engine_arena_at(engine) {
        Ok(engine.region.arena_offset() as u32)
    }

    /// Puts nine u32 at `out_at`: bytes of the region, the persistent part, the scratch and the arena; KV pages,
    /// free ones, most used at once; most rows of a batch; most bytes of the arena that blocks have reached.
    fn engine_memory(engine, out_at) {
        let figures = engine.memory();
        let out = engine.region.slice_mut("memory figures", out_at, 4 * figures.len() as u32)?;
        for (out, figure) in out.chunks_exact_mut(4).zip(figures) {
            out.copy_from_slice(&(figure as u32).to_le_bytes());
        }
        Ok(4 * figures.len() as u32)
    }

    /// Lets products of this process use up to `count` threads, in all engines: the bits are the same.
    fn engine_threads(_engine, count) {
        crate::kernels::matmul::set_threads(count as usize)?;
        Ok(count)
    }

    /// Puts XXH3-64 of `length` bytes at `bytes_at` into `out_at` (8 bytes, little-endian).
    fn xxh3_64_at(engine, bytes_at, length, out_at) {
        let digest = xxh3_64(engine.region.slice("bytes to digest", bytes_at, length)?);
        engine.region.slice_mut("digest", out_at, 8)?.copy_from_slice(&digest.to_le_bytes());
        Ok(8)
    }

    /// Compares `length` bytes at `bytes_at`, cut into groups of `group_length` (the last may be shorter), with
    /// the XXH3-64 of each, little-endian u64s at `expected_at`: 0 when all match, else 1 + the first bad group.
    fn first_bad_group(engine, bytes_at, length, group_length, expected_at) {
        if group_length == 0 {
            fail!(BadArgument, "groups of no bytes have no digests");
        }
        let groups = length.div_ceil(group_length);
        let Some(expected_length) = groups.checked_mul(8) else {
            fail!(BadArgument, "{groups} digests leave the region");
        };
        let bytes = engine.region.slice("groups to check", bytes_at, length)?;
        let expected = engine.region.slice("expected digests", expected_at, expected_length)?;
        let bad = bytes
            .chunks(group_length as usize)
            .zip(expected.chunks_exact(8))
            .position(|(group, digest)| xxh3_64(group).to_le_bytes() != digest);
        Ok(bad.map_or(0, |group| group as u32 + 1))
    }
}

/// 1 where this is the build with relaxed SIMD and it is the faster one, else 0. Both have the same bits.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
#[unsafe(no_mangle)]
pub extern "C" fn engine_relaxed_pays() -> i32 {
    crate::kernels::coded::has_dot().into()
}

/// Puts the sentence of the last error at the start of the mailbox, cut to fit; returns its bytes.
#[unsafe(no_mangle)]
pub extern "C" fn engine_error(handle: u32) -> i32 {
    super::find(handle).map_or(-(crate::Kind::BadHandle as i32), |slot| super::lock(&slot).write_error())
}

impl super::Slot {
    /// Copies the last error's sentence into the mailbox; returns its length in bytes.
    pub fn write_error(&mut self) -> i32 {
        let mailbox = self.engine.region.parts().mailbox;
        let mut length = self.error.len().min(mailbox.len());
        while !self.error.is_char_boundary(length) {
            length -= 1;
        }
        mailbox[..length].copy_from_slice(&self.error.as_bytes()[..length]);
        length as i32
    }
}
