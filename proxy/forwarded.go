package proxy

import (
	"net/netip"
	"strings"

	"kvgate/configs"
)

// networks are those of proxies that are trusted.
type networks []netip.Prefix

// newNetworks reads a list that configs has validated.
func newNetworks(list []string) networks {
	var n networks
	for _, text := range list {
		if p, err := configs.ParseNetwork(text); err == nil {
			n = append(n, p)
		}
	}
	return n
}

func (n networks) contain(ip string) bool {
	if len(n) == 0 {
		return false
	}
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return false
	}
	addr = addr.WithZone("").Unmap()
	for _, p := range n {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// clientAddress returns who asks: the connection's peer, or behind trusted
// proxies the last address of X-Forwarded-For that is none of them. Whatever is
// to the left of that one may have been made up.
func (x *exchange) clientAddress() string {
	if !x.c.trusted {
		return x.c.remote
	}
	client := x.c.remote
	for i := len(x.fields) - 1; i >= 0; i-- {
		if x.fields[i].id != fieldForwardedFor {
			continue
		}
		for list := string(x.fields[i].value); list != ""; {
			item := list
			if comma := strings.LastIndexByte(list, ','); comma >= 0 {
				item, list = list[comma+1:], list[:comma]
			} else {
				list = ""
			}
			item = strings.Trim(item, " \t")
			addr, err := netip.ParseAddr(item)
			if err != nil {
				return client
			}
			if client = addr.String(); !x.live.trusted.contain(client) {
				return client
			}
		}
	}
	return client
}
