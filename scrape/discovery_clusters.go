package scrape

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"kvgate/configs"
)

// Labels of a cluster that say where its metrics are, when that is not where its traffic goes.
const (
	metricsAddressLabel = "metricsAddress" // IP address or host name
	metricsPortLabel    = "metricsPort"
)

// metricsPlace returns host and port of a cluster's metrics, each "" when the labels
// do not say. The error names the label at fault.
func metricsPlace(label func(key string) (string, bool)) (host, port string, err error) {
	host, _ = label(metricsAddressLabel)
	port, _ = label(metricsPortLabel)
	if host != "" && !isHost(host) {
		return "", "", fmt.Errorf("the label %s has the value %q: write an IP address or a host name, without scheme and port", metricsAddressLabel, host)
	}
	if n, err := strconv.ParseUint(port, 10, 16); port != "" && (err != nil || n == 0) {
		return "", "", fmt.Errorf("the label %s has the value %q: write a number from 1 to 65535", metricsPortLabel, port)
	}
	return host, port, nil
}

// isHost accepts what can be dialled: an IP address without a zone, or a name.
func isHost(s string) bool {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Zone() == ""
	}
	bad := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	}
	return len(s) <= 253 && !strings.ContainsFunc(s, bad) && strings.Trim(s, "0123456789.") != "" && !strings.HasPrefix(s, ".")
}

// checkClusters refuses clusters whose labels do not say where their metrics are.
func checkClusters(endpoints []configs.Endpoint) error {
	var problems configs.Problems
	for _, e := range endpoints {
		if _, _, err := metricsPlace(func(key string) (string, bool) { v, ok := e.Labels[key]; return v, ok }); err != nil {
			problems.Add(e.Pos.At("labels").Problem("", "%v", err))
		}
	}
	return problems.Err()
}
