//! One causal forward pass from Rust, and a mistake that is refused with a message.
//!
//!     FLASH_ATTENTION_LIB_DIR=/usr/local/lib cargo run
mod ffi;

use std::ffi::CStr;
use std::mem::{size_of, MaybeUninit};

const SEQ: usize = 256;
const HEADS: usize = 4;
const DIM: usize = 64;

fn last_error() -> String {
    unsafe { CStr::from_ptr(ffi::flash_attention_last_error()) }.to_string_lossy().into_owned()
}

fn forward(head_dim: i64, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<(), String> {
    let (mut problem, mut buffers, mut options) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the functions fill the structs, whose sizes they are told; slices outlive the call, which only reads sizes
    // that `assert` has checked.
    unsafe {
        ffi::flash_attention_problem_init_sized(problem.as_mut_ptr(), size_of::<ffi::Problem>());
        ffi::flash_attention_buffers_init_sized(buffers.as_mut_ptr(), size_of::<ffi::Buffers>());
        ffi::flash_attention_options_init_sized(options.as_mut_ptr(), size_of::<ffi::Options>());
        let (mut problem, mut buffers, options) = (problem.assume_init(), buffers.assume_init(), options.assume_init());
        (problem.seq_q, problem.seq_kv) = (SEQ as i64, SEQ as i64);
        (problem.heads_q, problem.heads_kv) = (HEADS as i64, HEADS as i64);
        problem.head_dim = head_dim;
        problem.causal = 1;
        assert!([q.len(), k.len(), v.len(), out.len()].iter().all(|&n| n == SEQ * HEADS * DIM));
        (buffers.q, buffers.k, buffers.v) = (q.as_ptr().cast(), k.as_ptr().cast(), v.as_ptr().cast());
        buffers.out = out.as_mut_ptr().cast();
        match ffi::flash_attention_forward(&problem, &buffers, &options) {
            0 => Ok(()),
            _ => Err(last_error()),
        }
    }
}

fn main() {
    let values = |seed: usize| (0..SEQ * HEADS * DIM).map(|n| ((n * seed % 101) as f32) / 50.0 - 1.0).collect::<Vec<_>>();
    let (q, k) = (values(37), values(53));
    let v: Vec<f32> = (0..SEQ * HEADS * DIM).map(|n| (n % DIM) as f32).collect();
    let mut out = vec![0.0; SEQ * HEADS * DIM];
    forward(DIM as i64, &q, &k, &v, &mut out).expect("the forward pass");
    // Every row of v is 0, 1, ..., 63, so any average of rows is, too.
    assert!(out.iter().enumerate().all(|(n, &x)| (x - (n % DIM) as f32).abs() < 1e-3));
    let version = unsafe { CStr::from_ptr(ffi::flash_attention_version()) }.to_string_lossy();
    println!("flash_attention {version}: out = {:.3} {:.3} ... {:.3}", out[0], out[1], out[DIM - 1]);
    let refused = forward(-1, &q, &k, &v, &mut out).expect_err("a negative head_dim");
    println!("refused: {refused}");
    assert!(refused.contains("head_dim"));
}
