//! What hosts write down once: the functions that [`Kernels`](super::Kernels) point to, and what those with
//! vectors of sixteen bytes have in common.

/// Makes the kernels of `$isa`, compiled for `$features` or, without any, for what every processor of the host has.
macro_rules! entries {
    ($isa:ident $(, $features:literal)?) => {
        impl $isa {
            /// The kernels of a format, for processors that have the instructions.
            fn kernels<F: Codes>() -> Kernels {
                Kernels {
                    name: stringify!($isa),
                    matvec: Self::matvec::<F>,
                    tile: Self::tile_of::<F>(),
                    narrow: None,
                    unpack: Self::unpack::<F>,
                    wide: Self::WIDE,
                }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn matvec<F: Codes>(rows: Rows<'_>, acts: &Acts<'_>, out: &mut [f32]) {
                // SAFETY: kernels are called on processors that have the instructions.
                unsafe { super::matvec::matvec::<Self, F>(rows, acts, out) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn unpack<F: Codes>(starts: &[*const u8; MOST_ROWS], count: usize, panel: &mut Panel) {
                // SAFETY: kernels are called on processors that have the instructions.
                unsafe { super::tile::unpack::<Self, F>(starts, count, panel) }
            }
        }
        super::entries::tile_entry!($isa $(, $features)?);
    };
}
pub(super) use entries;

/// Of these, what several rows of activations take.
macro_rules! tile_entry {
    ($isa:ident $(, $features:literal)?) => {
        impl $isa {
            /// The tile of a format, and the lanes that it wants activations in.
            fn tile_of<F: Codes>() -> (Tile, usize) {
                let tile: Tile = match (F::UNIT, F::MINS) {
                    (16, _) => Self::tile::<16, false>,
                    (_, false) => Self::tile::<32, false>,
                    (_, true) => Self::tile::<32, true>,
                };
                (tile, Self::LANES)
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn tile<const UNIT: usize, const MINS: bool>(
                rows: Rows<'_>,
                acts: &Acts<'_>,
                layout: Layout,
                unpack: Unpack,
                out: &mut [f32],
            ) {
                // SAFETY: kernels are called on processors that have the instructions.
                unsafe { super::tile::tile::<Self, UNIT, MINS>(rows, acts, layout, unpack, out) }
            }
        }
    };
}
pub(super) use tile_entry;

/// Four rows, of weights as of activations, in a vector. The host says what `sums_of_four` are.
#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
macro_rules! four_rows {
    () => {
        const ROWS: usize = 4;
        const LANES: usize = 4;
        const TILE_ROWS: usize = 4;
        type Constants = Constants;
        type Pair = crate::quants::Pair;
        type Part = [Self::Ints; 2];
        type LaneInts = Self::Ints;
        type LaneFloats = Self::Floats;

        #[inline(always)]
        unsafe fn pairs<F: Codes>(k: &Constants, block: *const u8, take: impl FnMut(usize, Self::Pair)) {
            unsafe { F::pairs(k, block, take) }
        }
        #[inline(always)]
        unsafe fn keep<F: Codes>(part: Self::Part, place: &mut Self::Part) {
            place[0] = part[0];
            if F::UNIT == 16 {
                place[1] = part[1];
            }
        }
        #[inline(always)]
        unsafe fn reduce<const UNIT: usize>(parts: &[Self::Part; MOST_ROWS]) -> [Self::Ints; 2] {
            let first = sums_of_four([parts[0][0], parts[1][0], parts[2][0], parts[3][0]]);
            if UNIT == 32 {
                return [first, first];
            }
            [first, sums_of_four([parts[0][1], parts[1][1], parts[2][1], parts[3][1]])]
        }
        #[inline(always)]
        unsafe fn lane_floats(a: Self::Ints) -> Self::Floats {
            unsafe { Self::floats(a) }
        }
        #[inline(always)]
        unsafe fn lane_store_floats(a: Self::Floats, at: *mut f32) {
            unsafe { Self::store(a, at) }
        }
        #[inline(always)]
        unsafe fn lane_float(a: f32) -> Self::Floats {
            unsafe { Self::splat(a) }
        }
        #[inline(always)]
        unsafe fn lane_mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
            unsafe { Self::mul(a, b) }
        }
        #[inline(always)]
        unsafe fn lane_add(a: Self::Floats, b: Self::Floats) -> Self::Floats {
            unsafe { Self::add(a, b) }
        }
        #[inline(always)]
        unsafe fn lane_sub(a: Self::Floats, b: Self::Floats) -> Self::Floats {
            unsafe { Self::sub(a, b) }
        }
    };
}
#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
pub(super) use four_rows;
