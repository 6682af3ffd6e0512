//! A tuning profile: no text may make its reader panic, and an accepted profile is accepted again
//! after it is written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symm::coll::cost::profile::Profile;

fuzz_target!(|data: &[u8]| {
    if let Ok(profile) = Profile::parse(data) {
        // Numbers may differ in the last digit.
        let written = serde_json::to_vec(&profile).expect("what was read can be written");
        let again = Profile::parse(&written).expect("a profile that was accepted");
        assert_eq!(again.groups.len(), profile.groups.len());
        assert!(profile.groups.iter().all(|group| group.thresholds().stream_bytes > 0));
    }
});
