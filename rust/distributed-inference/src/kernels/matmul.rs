//! Activations times quantised weight rows: the one kernel that every phase, the vocabulary head and
//! the benchmarks go through.

use super::dot::{LANES, Lanes, accumulate, accumulate_plain, reduce};
use crate::quants::{Format, Path};
use crate::{Result, fail};

/// Weight rows that are dequantised and multiplied together: enough independent sums to fill the
/// pipeline of a core, few enough to stay in its registers.
const TILE_ROWS: usize = 4;
/// Columns of a tile: a whole number of blocks of every format, and of lanes.
const TILE_COLS: usize = 256;
/// Batch rows that share one dequantised tile.
const TILE_BATCH: usize = 32;

/// Consecutive rows of a weight matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    format: &'static Format,
    bytes: &'a [u8],
    row_bytes: usize,
    cols: usize,
}

impl<'a> Weights<'a> {
    /// `rows` rows of `cols` elements in `bytes`, or an error that names `what` and both lengths.
    pub fn new(
        what: impl std::fmt::Display,
        format: &'static Format,
        cols: usize,
        rows: usize,
        bytes: &'a [u8],
    ) -> Result<Self> {
        let row_bytes = format.row_bytes(cols)?;
        if row_bytes.checked_mul(rows) != Some(bytes.len()) {
            fail!(
                BadArgument,
                "{what}: {rows} rows of {cols} elements in {} are {} bytes, but {} were given",
                format.name,
                row_bytes as u64 * rows as u64,
                bytes.len()
            );
        }
        Ok(Self { format, bytes, row_bytes, cols })
    }

    /// Rows there are.
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Writes one row's values.
    pub fn dequantise(&self, row: usize, out: &mut [f32]) {
        self.format.dequantise(Path::Fast, &self.bytes[row * self.row_bytes..][..self.row_bytes], out);
    }

    /// Writes `cols` values of `row` from column `from` on.
    fn dequantise_part(&self, path: Path, row: usize, from: usize, out: &mut [f32]) {
        let at = row * self.row_bytes + from / self.format.elements * self.format.bytes;
        let length = out.len() / self.format.elements * self.format.bytes;
        self.format.dequantise(path, &self.bytes[at..at + length], out);
    }
}

/// Calls `emit(row, batch_row, value)` with the dot product of every weight row with every row of `x`,
/// which is f32 [batch, cols].
///
/// The value depends on the weight row and the activations of its batch row alone (see
/// [`crate::kernels::dot`]): not on the rows beside it, nor on how a matrix is cut into blocks.
pub fn matmul(weights: &Weights<'_>, x: &[f32], emit: impl FnMut(usize, usize, f32)) {
    with_path(Path::Fast, weights, x, emit);
}

/// [`matmul`] with the plain twins of the SIMD code.
pub fn matmul_plain(weights: &Weights<'_>, x: &[f32], emit: impl FnMut(usize, usize, f32)) {
    with_path(Path::Plain, weights, x, emit);
}

fn with_path(path: Path, weights: &Weights<'_>, x: &[f32], mut emit: impl FnMut(usize, usize, f32)) {
    if let (Path::Fast, Some(dot), true) = (path, weights.format.dot(), x.len() == weights.cols) {
        // One batch row: no values are written down, since none is used twice.
        for (row, bytes) in weights.bytes.chunks_exact(weights.row_bytes).enumerate() {
            let mut lanes = [0.0; LANES];
            dot(bytes, x, &mut lanes);
            emit(row, 0, reduce(&lanes));
        }
        return;
    }
    let mut lanes = [[[0.0; LANES]; TILE_ROWS]; TILE_BATCH];
    for (tile, x) in x.chunks(TILE_BATCH * weights.cols).enumerate() {
        let batch = x.len() / weights.cols;
        for row in (0..weights.rows()).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(weights.rows() - row);
            if rows == TILE_ROWS {
                multiply_tile::<TILE_ROWS>(path, weights, row, x, &mut lanes[..batch]);
            } else {
                multiply_rest(path, weights, row, rows, x, &mut lanes[..batch]);
            }
            for (batch_row, lanes) in lanes[..batch].iter().enumerate() {
                for (i, lanes) in lanes[..rows].iter().enumerate() {
                    emit(row + i, tile * TILE_BATCH + batch_row, reduce(lanes));
                }
            }
        }
    }
}

/// Leaves in `lanes` the partial sums of `ROWS` weight rows from `row` on.
fn multiply_tile<const ROWS: usize>(
    path: Path,
    weights: &Weights<'_>,
    row: usize,
    x: &[f32],
    lanes: &mut [[Lanes; ROWS]],
) {
    let mut tile = [[0.0; TILE_COLS]; ROWS];
    lanes.fill([[0.0; LANES]; ROWS]);
    for from in (0..weights.cols).step_by(TILE_COLS) {
        let cols = TILE_COLS.min(weights.cols - from);
        for (i, values) in tile.iter_mut().enumerate() {
            weights.dequantise_part(path, row + i, from, &mut values[..cols]);
        }
        let values = tile.each_ref().map(|values| &values[..cols]);
        for (x, lanes) in x.chunks_exact(weights.cols).zip(lanes.iter_mut()) {
            let x = &x[from..from + cols];
            match path {
                Path::Fast => accumulate(values, x, lanes),
                Path::Plain => {
                    values.iter().zip(lanes).for_each(|(w, lanes)| accumulate_plain(lanes, w, x));
                }
            }
        }
    }
}

/// The same for fewer rows than a tile has, one by one.
fn multiply_rest(
    path: Path,
    weights: &Weights<'_>,
    row: usize,
    rows: usize,
    x: &[f32],
    lanes: &mut [[Lanes; TILE_ROWS]],
) {
    let mut one = [[[0.0; LANES]; 1]; TILE_BATCH];
    for i in 0..rows {
        multiply_tile(path, weights, row + i, x, &mut one[..lanes.len()]);
        for (lanes, one) in lanes.iter_mut().zip(&one) {
            lanes[i] = one[0];
        }
    }
}
