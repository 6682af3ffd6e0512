//! What the environment says. The only reader of `std::env`; read once, printed once at INFO.

use std::sync::OnceLock;

/// The settings of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `SYMM_LOG`: `off`, `error`, `warn` (the default), `info`, `debug` or `trace`, or an `env_logger` filter.
    pub log: String,
    /// `TORCHELASTIC_RESTART_COUNT`: keeps the keys of one attempt of a job apart from those of the next. Default `"0"`.
    pub restart: String,
    /// `SYMM_SPIN`: how often a waiting thread looks before it sleeps; absent: chosen from the number of cores.
    pub spin: Option<u32>,
    /// `SYMM_CMA`: `0` forbids single-copy transfers by `process_vm_readv`. Default on.
    pub cma: bool,
    /// `SYMM_STORE_BYTES`: how much a store's server holds, in bytes; absent: 256 MiB.
    pub store_bytes: Option<usize>,
}

impl Config {
    /// The settings found by `lookup`, and a sentence for each value that could not be used.
    fn parse(lookup: impl Fn(&str) -> Option<String>) -> (Self, Vec<String>) {
        let set = |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let mut complaints = Vec::new();
        let mut number = |name: &str| {
            let value = set(name)?;
            let parsed = value.parse::<u64>().ok();
            if parsed.is_none() {
                complaints.push(format!("{name}={value:?} is not a whole number; ignored"));
            }
            parsed
        };
        let spin = number("SYMM_SPIN").map(|spin| u32::try_from(spin).unwrap_or(u32::MAX));
        let store_bytes = number("SYMM_STORE_BYTES").map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let cma = match set("SYMM_CMA").as_deref() {
            None | Some("1") => true,
            Some("0") => false,
            Some(value) => {
                complaints.push(format!("SYMM_CMA={value:?} is neither 0 nor 1; ignored"));
                true
            }
        };
        let config = Self {
            log: set("SYMM_LOG").unwrap_or_else(|| "warn".into()),
            restart: set("TORCHELASTIC_RESTART_COUNT").unwrap_or_else(|| "0".into()),
            spin,
            cma,
            store_bytes,
        };
        (config, complaints)
    }

    /// The settings of this process: read at the first call, which also starts logging.
    pub fn get() -> &'static Self {
        static CONFIG: OnceLock<Config> = OnceLock::new();
        CONFIG.get_or_init(|| {
            let (config, complaints) = Self::parse(|name| std::env::var(name).ok());
            // Fails only where the program around us has set a logger: then that one is used.
            let _ = env_logger::Builder::new().parse_filters(&config.log).try_init();
            for complaint in complaints {
                log::warn!("{complaint}");
            }
            log::info!("{config:?}");
            config
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> (Config, usize) {
        let (config, complaints) = Config::parse(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()));
        (config, complaints.len())
    }

    #[test]
    fn defaults_stand_where_nothing_is_set() {
        let (config, complaints) = parse(&[("SYMM_LOG", " ")]);
        assert_eq!(config, Config { log: "warn".into(), restart: "0".into(), spin: None, cma: true, store_bytes: None });
        assert_eq!(complaints, 0);
    }

    #[test]
    fn values_are_taken_and_bad_ones_complained_about() {
        let (config, complaints) = parse(&[
            ("SYMM_LOG", "debug"),
            ("TORCHELASTIC_RESTART_COUNT", "3"),
            ("SYMM_SPIN", "200"),
            ("SYMM_CMA", "0"),
            ("SYMM_STORE_BYTES", "4096"),
        ]);
        assert_eq!(config, Config { log: "debug".into(), restart: "3".into(), spin: Some(200), cma: false, store_bytes: Some(4096) });
        assert_eq!(complaints, 0);
        let (config, complaints) = parse(&[("SYMM_SPIN", "-1"), ("SYMM_CMA", "no"), ("SYMM_STORE_BYTES", "1G")]);
        assert_eq!((config.spin, config.cma, config.store_bytes, complaints), (None, true, None, 3));
    }
}
