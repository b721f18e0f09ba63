package process

import (
	"errors"
	"fmt"
	"net"
	"syscall"
)

// Listen opens the address in a field of a config file.
func Listen(field, address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s: %s is in use; stop what listens there, or name another address", field, address)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return l, nil
}
