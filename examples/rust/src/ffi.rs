//! The beginning of c_api.h's structs, as far as this program uses them. `size` tells the library how much there is, so
//! fields at the end of the C structs may be left out; `_init_sized` writes no more than that.
use std::ffi::{c_char, c_void};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Strides {
    pub batch: i64,
    pub seq: i64,
    pub head: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ScoreTensor {
    pub present: i32,
    pub dtype: i32,
    pub batch_stride: i64,
    pub head_stride: i64,
    pub q_stride: i64,
}

#[repr(C)]
pub struct Problem {
    pub size: usize,
    pub batch: i64,
    pub seq_q: i64,
    pub seq_kv: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub total_q: i64,
    pub total_kv: i64,
    pub dtype: i32,
    pub packed: i32,
    pub tensor_strides: [Strides; 8],
    pub bias: ScoreTensor,
    pub mask: ScoreTensor,
    pub scale: f32,
    pub softcap: f32,
    pub dropout_p: f32,
    pub alibi: i32,
    pub alibi_batch_stride: i64,
    pub window_left: i64,
    pub window_right: i64,
    pub causal: i32,
    pub alignment: i32,
}

#[repr(C)]
pub struct Buffers {
    pub size: usize,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub out: *mut c_void,
    pub lse: *mut f32,
}

#[repr(C)]
pub struct Options {
    pub size: usize,
    pub device_kind: i32,
    pub device_index: i32,
    pub emulated_arch: i32,
    pub stream: *mut c_void,
}

extern "C" {
    pub fn flash_attention_problem_init_sized(problem: *mut Problem, size: usize);
    pub fn flash_attention_buffers_init_sized(buffers: *mut Buffers, size: usize);
    pub fn flash_attention_options_init_sized(options: *mut Options, size: usize);
    pub fn flash_attention_forward(problem: *const Problem, buffers: *const Buffers, options: *const Options) -> i32;
    pub fn flash_attention_last_error() -> *const c_char;
    pub fn flash_attention_version() -> *const c_char;
}
