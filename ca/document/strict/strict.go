// Package strict owns how JSON that was stored is read and decoded. It refuses fields that nobody knows, what follows a value, and to read on for
// ever.
package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
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

// Read returns what a file holds, as far as one byte beyond most: whoever parses it says that it is too large.
func Read(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, int64(most)+1))
}

// Kept decodes a file that a process keeps for its next start: at most so many bytes, and of one format, which v has in *has.
func Kept(data []byte, most, format int, v any, has *int) error {
	if len(data) > most {
		return fmt.Errorf("it is larger than %d bytes", most)
	}
	if err := JSON(data, v); err != nil {
		return err
	}
	if *has != format {
		return fmt.Errorf("its format is %d; this version reads %d", *has, format)
	}
	return nil
}
