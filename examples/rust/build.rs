// Where the library is: FLASH_ATTENTION_LIB_DIR, else where the linker looks by itself.
fn main() {
    println!("cargo:rerun-if-env-changed=FLASH_ATTENTION_LIB_DIR");
    if let Ok(folder) = std::env::var("FLASH_ATTENTION_LIB_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
    println!("cargo:rustc-link-lib=dylib=flash_attention");
}
