//! The inner loops: dot products in one fixed order, integer products of coded weights, and the front of both.

pub mod acts;
pub mod coded;
pub mod dot;
pub mod matmul;
