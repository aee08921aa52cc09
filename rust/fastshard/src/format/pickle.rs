//! Inert pickle machine.
