// Package strict owns how JSON that was stored is decoded. It refuses fields that nobody knows, and what follows a value.
package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// JSON decodes one JSON value, and refuses fields that v does not have and what follows the value.
func JSON(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) { // More takes a brace too many for the end
		return errors.New("there is more than one JSON value")
	}
	return nil
}
