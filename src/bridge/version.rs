//! Version of the library.

pub(super) fn version() -> String {
    env!("TORCH_SYMM_VERSION").into()
}
