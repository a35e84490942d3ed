-- One body for every request; one line of JSON at the end, latencies in microseconds.
local file = io.open(os.getenv("BODY"), "rb")
wrk.method, wrk.body = "POST", file:read("*a")
for name, value in os.getenv("HEADERS"):gmatch("([^:;]+):([^;]+)") do wrk.headers[name] = value end
function done(summary, latency, requests)
  local bad = summary.errors
  io.write(string.format('{"requests":%d,"seconds":%.6f,"p50_us":%d,"p99_us":%d,"errors":%d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    bad.connect + bad.read + bad.write + bad.status + bad.timeout))
end
