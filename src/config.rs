//! What the environment says; read once, printed once at INFO.

use std::sync::OnceLock;

/// Settings of this process.
#[derive(Clone, Debug)]
pub struct Config {
    /// `SYMM_LOG`: `error`, `warn` (default), `info`, `debug`, `trace`, or a filter in env_logger's syntax.
    pub log: String,
    /// `SYMM_CMA`: `0` keeps ranks from reading each other's memory directly. Must be the same on all ranks to have an effect on any.
    pub direct: bool,
    /// `SYMM_SPINS`: turns a waiting thread spins before it gives its core away.
    pub spins: Option<u32>,
    /// `TORCHELASTIC_RESTART_COUNT`: which attempt of the job this is.
    pub restart: String,
}

/// The settings. The first call starts logging to stderr, unless the program has a logger of its own.
pub fn get() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let read = |name: &str| std::env::var(name).ok();
        let config = Config {
            log: read("SYMM_LOG").unwrap_or_else(|| "warn".into()),
            direct: read("SYMM_CMA").is_none_or(|value| value != "0"),
            spins: read("SYMM_SPINS").and_then(|value| value.parse().ok()),
            restart: read("TORCHELASTIC_RESTART_COUNT").unwrap_or_else(|| "0".into()),
        };
        let _ = env_logger::Builder::new().parse_filters(&config.log).try_init();
        log::info!("{config:?}");
        config
    })
}
