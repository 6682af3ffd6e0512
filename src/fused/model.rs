//! Model of a device and its links.

use super::DeviceModel;
use crate::coll::cost::hardware;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::driver::Device;
use crate::lock::lock;
use crate::topo::cost::LinkKind;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Part of the model that does not depend on the element type.
#[derive(Clone, Copy)]
struct DeviceHardware {
    major: u32,
    processors: usize,
    link: f64,
}

/// A model of a CPU core and the host's memory. Its numbers do not matter, because nothing overlaps
/// there.
const HOST: DeviceModel = DeviceModel { processors: 1, flops_per_us: 5e4, link: 5.0, memory: 10.0 };

/// Hardware by device; each device is queried once.
static HARDWARE: Mutex<BTreeMap<i32, DeviceHardware>> = Mutex::new(BTreeMap::new());

/// Returns the model of CUDA device `device`, or of the host if `device` is negative.
pub fn of_device(device: i32, dtype: DType) -> Result<DeviceModel> {
    if device < 0 {
        return Ok(HOST);
    }
    let mut known = lock(&HARDWARE);
    let hardware = match known.get(&device) {
        Some(hardware) => *hardware,
        None => *known.entry(device).or_insert(ask(device)?),
    };
    Ok(model(hardware, dtype))
}

fn ask(device: i32) -> Result<DeviceHardware> {
    let opened = Device::open(device)?;
    let way = hardware::gpus().map_or(LinkKind::Pcie, |(_, way)| *way);
    Ok(DeviceHardware {
        major: opened.capability.0,
        processors: opened.processors()?,
        link: way.link().gb_per_s,
    })
}

fn model(DeviceHardware { major, processors, link }: DeviceHardware, dtype: DType) -> DeviceModel {
    // TFLOPS of a processor in 16 bits: an H200 reaches 790 with 132 processors (2026-11-20, 4096 ×
    // 1024 × 8192); others are scaled by their data sheets. Wider types run without tensor cores.
    let (wide, memory) = match major {
        0..=7 => (0.8, 800.0),
        8 => (2.4, 1400.0),
        9 => (6.0, 3500.0),
        10.. => (10.0, 6000.0),
    };
    let teraflops = if dtype.size() <= 2 { wide } else { wide / 15.0 };
    DeviceModel { processors, flops_per_us: teraflops * 1e6, link, memory }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_known_devices() {
        let h200 = DeviceHardware { major: 9, processors: 132, link: 369.0 };
        let wide = model(h200, DType::BF16);
        assert_eq!((wide.processors, wide.flops_per_us, wide.link), (132, 6e6, 369.0));
        assert!(model(h200, DType::F32).flops_per_us < wide.flops_per_us / 10.0);
        assert!(model(DeviceHardware { major: 12, ..h200 }, DType::F16).memory > wide.memory);
    }

    #[test]
    fn the_host_needs_no_driver_and_a_device_does() {
        assert_eq!(of_device(-1, DType::F32), Ok(HOST));
        assert!(of_device(4711, DType::F32).is_err());
    }
}
