"""What a router tells about itself: metrics, traces, alarms, recorded traffic."""
