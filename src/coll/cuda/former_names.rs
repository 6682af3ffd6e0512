//! Names that settings and profiles of earlier versions have.

const FORMER: [(&str, &str); 3] =
    [("gated_bytes", "zero_copy_bytes"), ("gated_two_shot_bytes", "zero_copy_two_shot_bytes"), ("two_stage", "rsag_staged")];

/// The name by which `name` goes now: itself, unless an earlier version had another.
pub fn current(name: &str) -> &str {
    FORMER.iter().find(|(former, _)| *former == name).map_or(name, |(_, now)| now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cost::profile::Profile;
    use crate::coll::cuda::plan::Tuning;

    #[test]
    fn what_earlier_versions_wrote_is_read() {
        assert_eq!((current("two_stage"), current("one_shot")), ("rsag_staged", "one_shot"));
        let tuning = Tuning::of(4).overlaid("gated_bytes=123, gated_two_shot_bytes=456").expect("read");
        assert_eq!((tuning.zero_copy_bytes, tuning.zero_copy_two_shot_bytes), (123, 456));
    }

    #[test]
    fn profiles_of_earlier_versions_say_the_same() {
        let now = include_str!("../../../python/torch_symm/profiles/cuda-nvidia-h200-nvlink-4-0-x-18-2-ranks.json");
        let former = now.replace("rsag_staged", "two_stage");
        assert_ne!(former, now);
        let read = |text: &str| Profile::parse(text.as_bytes()).expect("a profile");
        assert_eq!(read(&former), read(now));
    }
}
