//! Meeting.
