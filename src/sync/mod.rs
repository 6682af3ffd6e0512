//! Waits of a group's members for each other: never without a deadline, never past a failure.

pub mod atomic;
pub mod call_site;
pub mod doorbell;
pub mod failure;
pub mod final_check;
pub mod flag;
pub mod ring;
pub mod shared_text;
pub mod timeout;
pub mod work_items;
