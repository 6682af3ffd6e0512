//! How many processors of a GPU the kernels of a group may take.

/// How many processors long collectives may take from computation that runs at the same time; NCCL:
/// `ctaPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CtaPolicy {
    /// Kernels may use the whole GPU.
    #[default]
    Default,
    /// Kernels have few blocks.
    Efficiency,
    /// Copy engines move long messages.
    Zero,
}

impl CtaPolicy {
    /// Every policy.
    pub const ALL: [CtaPolicy; 3] = [CtaPolicy::Default, CtaPolicy::Efficiency, CtaPolicy::Zero];

    /// Returns the policy with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// Returns its name in options and in the environment.
    pub fn name(self) -> &'static str {
        match self {
            CtaPolicy::Default => "default",
            CtaPolicy::Efficiency => "efficiency",
            CtaPolicy::Zero => "zero",
        }
    }
}

/// The part of a group's options that limits the processors which its kernels take; the same on all
/// ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtaOptions {
    /// The policy.
    pub policy: CtaPolicy,
    /// Maximum number of blocks of a kernel; NCCL: `maxCTAs`.
    pub most: Option<usize>,
}
