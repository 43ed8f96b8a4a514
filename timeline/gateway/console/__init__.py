"""The console: pages for a browser, in which people see and steer what the gateway reaches."""
