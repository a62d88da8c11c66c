//! Single kernels behind the ABI, for any engine: rows of an embedding table, products, and what is known
//! of a type.

use super::abi;
use crate::engine::Engine;
use crate::kernels::matmul::{Path, Weights, matmul, matmul_plain};
use crate::quants::Format;
use crate::{Result, fail};

/// Bytes of f32 [rows, cols], or an error when the ABI cannot address them.
fn f32_bytes(what: &str, rows: u32, cols: u32) -> Result<u32> {
    match u64::from(rows) * u64::from(cols) {
        count if count * 4 <= u64::from(u32::MAX) => Ok(count as u32 * 4),
        _ => fail!(BadArgument, "{what}: {rows} rows of {cols} numbers are more than the ABI can address"),
    }
}

fn floats<'a>(what: &str, bytes: &'a [u8]) -> Result<&'a [f32]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(floats) => Ok(floats),
        Err(_) => fail!(BadArgument, "{what} must lie at a multiple of 4 bytes"),
    }
}

fn floats_mut<'a>(what: &str, bytes: &'a mut [u8]) -> Result<&'a mut [f32]> {
    match bytemuck::try_cast_slice_mut(bytes) {
        Ok(floats) => Ok(floats),
        Err(_) => fail!(BadArgument, "{what} must lie at a multiple of 4 bytes"),
    }
}

/// The arguments of a product: type, columns, rows, and where everything lies.
struct Product {
    format: u32,
    cols: u32,
    n_rows: u32,
    w: (u32, u32),
    batch: u32,
    x_at: u32,
    y_at: u32,
}

impl Product {
    fn run(&self, engine: &mut Engine, path: Path) -> Result<u32> {
        let n_rows = self.n_rows as usize;
        let y_bytes = f32_bytes("y", self.batch, self.n_rows)?;
        let (beside, y) = engine.region.output("y", self.y_at, y_bytes)?;
        let x = floats("x", beside.slice("x", self.x_at, f32_bytes("x", self.batch, self.cols)?)?)?;
        let y = floats_mut("y", y)?;
        let bytes = beside.slice("w", self.w.0, self.w.1)?;
        let weights = Weights::new("w", Format::of_type(self.format)?, self.cols as usize, n_rows, bytes)?;
        let emit = |row: usize, batch_row: usize, values: &[f32]| {
            y[batch_row * n_rows + row..][..values.len()].copy_from_slice(values);
        };
        match path {
            Path::Fast => matmul(&weights, x, emit),
            Path::Plain => matmul_plain(&weights, x, emit),
        }
        Ok(y_bytes)
    }
}

abi! {
    /// Elements of a block of a ggml type, shifted left by 16, and its bytes.
    fn type_block(_engine, format) {
        let format = Format::of_type(format)?;
        Ok((format.elements << 16 | format.bytes) as u32)
    }

    /// Dequantises `n_rows` raw rows into f32 [n_rows, cols] at `out_at`; returns the bytes written.
    fn embed_range_sliced(engine, format, cols, n_rows, rows_at, rows_length, out_at) {
        let out_bytes = f32_bytes("out", n_rows, cols)?;
        let (beside, out) = engine.region.output("out", out_at, out_bytes)?;
        let bytes = beside.slice("rows", rows_at, rows_length)?;
        let out = floats_mut("out", out)?;
        let rows = Weights::new("rows", Format::of_type(format)?, cols as usize, n_rows as usize, bytes)?;
        for (row, out) in out.chunks_exact_mut(cols as usize).enumerate() {
            rows.dequantise(row, out);
        }
        Ok(out_bytes)
    }

    /// y = x · wᵀ for f32 x [batch, cols] and rows w [n_rows, cols]; y is f32 [batch, n_rows]. Returns its bytes.
    fn matmul_block(engine, format, cols, n_rows, w_at, w_length, batch, x_at, y_at) {
        Product { format, cols, n_rows, w: (w_at, w_length), batch, x_at, y_at }.run(engine, Path::Fast)
    }

    /// [`matmul_block`] with the plain twins of the SIMD code, for tests: the bits are the same.
    fn matmul_block_plain(engine, format, cols, n_rows, w_at, w_length, batch, x_at, y_at) {
        Product { format, cols, n_rows, w: (w_at, w_length), batch, x_at, y_at }.run(engine, Path::Plain)
    }
}
